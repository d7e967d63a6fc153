"""The operators on Ascend: the vendor's names stand here, and what the vendor asks of them. Import is free of
torch_npu.
"""
