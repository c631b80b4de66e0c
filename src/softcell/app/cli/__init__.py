"""The command line: a thin layer over `softcell.api`.

`main` imports the module of a command only when that command runs, because those modules import torch and help must
appear immediately. For `softcell COMMAND --help` it imports that module with empty modules in place of the core.
"""
