"""What the tables of a sweep show: read back, and cut into what each picture draws.

What belongs here: choosing rows and putting them in order. What does not: running, computing metrics, drawing.
"""
