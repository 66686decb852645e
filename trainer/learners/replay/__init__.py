"""Apply the model server's sampling settings and grammars to the trainer's logits."""
