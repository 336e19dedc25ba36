"""Image classification by convolutional networks."""
