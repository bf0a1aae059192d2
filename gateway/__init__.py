"""Front doors that speak filesystem protocols."""
