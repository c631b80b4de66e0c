"""`python -m softcell`, and `torchrun -m softcell` for several processes."""

import os

if os.environ.get("WORLD_SIZE", "1") != "1":
    # When a process is lost, torch's store logs pages of C++ frames above our one message. Read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from softcell.app.cli.main import main

if __name__ == "__main__":
    main()
