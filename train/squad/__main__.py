"""`python -m train.squad`: see `train.squad.command`."""

from train.squad.command import main

if __name__ == "__main__":
    main()
