"""The checks behind `gspo validate` and `gspo doctor`."""
