"""What is wrong with weights from elsewhere."""


class WeightsError(ValueError):
    """Weights, or their `config.json`, are not this model's; the message says how."""
