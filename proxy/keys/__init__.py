"""Let in who has a key: the ports ask for one as soon as any was made."""
