"""Name the stack frames of torch's that tell which module runs. Torch-free: heartbeats are read where there is no torch."""

CALLING = "_wrapped_call_impl"
"""The function in which a module is called; its ``self`` is the module."""
FSDP_FILE = "_fsdp_param_group.py"
"""The file of the functions in which FSDP2 gathers and reduces."""
MODULE_NAME = "_module_fqn"
"""The attribute of those functions' ``self`` that holds the module's path."""
