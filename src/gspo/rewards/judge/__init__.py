"""A language model as a judge of responses: its questions, client, verdict cache and scorer."""
