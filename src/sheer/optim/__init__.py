"""Optimizers and schedules by name; the loss scale; the update of flat shards; state by parameter name."""
