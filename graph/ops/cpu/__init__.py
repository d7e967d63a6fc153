"""The fast operators of the CPU target: C++ kernels behind torch operators."""
