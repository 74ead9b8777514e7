"""AdamW on the device, or with its state in host memory."""
