"""The CustomResourceDefinition and the admission policy, generated from the models."""
