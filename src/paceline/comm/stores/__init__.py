"""Values in the store of a job: signed, over connections of their own."""
