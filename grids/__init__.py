"""Ready grid files. A package, so that they are found wherever Longlaw is installed (`longlaw.ready_grids`)."""
