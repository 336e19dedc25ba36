"""`python -m train.lm`: see `train.lm.command`."""

from train.lm.command import main

if __name__ == "__main__":
    main()
