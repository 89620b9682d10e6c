"""Is a mathematical answer the label?"""
