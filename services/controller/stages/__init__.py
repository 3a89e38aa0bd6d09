"""What the controller computes between the roles' calls; pages are written in these functions."""
