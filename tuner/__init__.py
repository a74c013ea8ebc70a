"""Jobs that find CBN's rho and omega, with KerasTuner."""
