"""`python -m train.images`: see `train.images.command`."""

from train.images.command import main

if __name__ == "__main__":
    main()
