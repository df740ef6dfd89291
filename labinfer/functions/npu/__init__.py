"""Functions of Ascend NPUs, by operators of torch_npu."""
