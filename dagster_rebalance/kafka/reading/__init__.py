"""Reading records: the fetcher of a member, and the reader of exact ranges."""
