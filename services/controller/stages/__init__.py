"""Functions that the controller runs between the roles' calls; pages are composed of them."""
