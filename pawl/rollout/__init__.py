"""Run any agent on a file of tasks, and turn what comes out into feedback: `pawl rollout`.

The package knows the proxy by its HTTP alone, and never imports the trainer.
"""
