"""Operations with several implementations: `api` chooses, and all share one test suite."""
