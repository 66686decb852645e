"""Run any agent on a file of tasks, and turn what comes out into feedback: `pawl rollout`.

An agent gets its task and a base URL that names task, episode and split; nothing in it changes. The
package knows the proxy by its HTTP alone, and never imports the trainer.
"""
