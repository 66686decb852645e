"""Write the pages of the HTTP API: `http.md` for people, and `openapi.json` for programs."""
