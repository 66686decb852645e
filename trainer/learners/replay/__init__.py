"""Sample from the trainer's logits as the model server sampled from its own, without sampling."""
