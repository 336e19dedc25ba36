"""`python -m train.squad`: see `train.squad.fine_tune`."""

from train.squad.fine_tune import main

if __name__ == "__main__":
    main()
