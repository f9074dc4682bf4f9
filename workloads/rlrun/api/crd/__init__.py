"""The CustomResourceDefinition and the admission policy, made from the models."""
