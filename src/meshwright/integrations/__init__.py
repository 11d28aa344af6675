"""Let loops that others wrote (transformers.Trainer, TRL, accelerate, Lightning Fabric) step a laid-out model."""
