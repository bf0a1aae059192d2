"""Object stores of others: the place of cold data, and the source and target of trees."""
