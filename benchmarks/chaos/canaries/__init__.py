"""Kill steward, trainer, proxy and model server while live episodes decide about versions."""
