"""Target `ascend-sim`: torchair's real front end on a machine without an NPU, its graphs checked and executed."""
