"""`python -m softcell`, and `torchrun -m softcell` for several processes."""

from softcell.app.cli.main import main

if __name__ == "__main__":
    main()
