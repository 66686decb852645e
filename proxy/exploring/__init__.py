"""Sample a share of a policy's episodes with changed settings, so that something can be learned."""
