"""Read the images of records: their tokens when a corpus is made, their pixels when rows are dealt."""
