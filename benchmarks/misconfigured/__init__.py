"""What a misconfiguration costs: episodes until it is known, seconds until learning goes on."""
