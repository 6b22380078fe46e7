"""every answer of a run on disk, found again and judged again"""
