"""`python -m train.plan`: see `train.plan.command`."""

from train.plan.command import main

if __name__ == "__main__":
    main()
