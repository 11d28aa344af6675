"""Write a checkpoint's model in the forms that transformers and peft read."""
