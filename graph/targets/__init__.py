"""Where and how graphs run. Only here and in the ascend operators is a compiler or a vendor package named."""
