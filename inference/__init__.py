"""The model side. torch and transformers are imported here and nowhere else."""
