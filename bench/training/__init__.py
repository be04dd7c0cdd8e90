"""Small models that train in several precisions: the GPT of `bench.train`, on one process or many; the tasks of `bench.paper`."""
