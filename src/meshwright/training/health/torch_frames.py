"""Name torch's stack frames that tell which module runs; torch-free, since heartbeats are read without torch."""

CALLING = "_wrapped_call_impl"
"""The function through which torch calls a module; its ``self`` is the module."""
FSDP_FILE = "_fsdp_param_group.py"
"""The file of the functions in which FSDP2 gathers and reduces."""
MODULE_NAME = "_module_fqn"
"""The attribute that holds the module's path, on the ``self`` of the functions in ``FSDP_FILE``."""
