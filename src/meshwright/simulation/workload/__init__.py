"""Price the work of a step: products, attention, memory traffic, messages, pipelines, memory."""
