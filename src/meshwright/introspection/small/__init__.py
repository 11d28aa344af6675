"""Make small copies of models, to measure and to rehearse on."""
