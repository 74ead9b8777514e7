"""Graders of answers: math, code and the tasks of reasoning-gym."""
