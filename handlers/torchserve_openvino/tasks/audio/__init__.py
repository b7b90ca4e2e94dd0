"""The audio tasks: recordings are decoded one by one, and run padded to compiled lengths where the model masks them."""
