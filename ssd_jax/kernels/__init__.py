"""Operations with several implementations: `api` chooses one, and all share one test suite."""
