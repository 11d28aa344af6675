"""Train at one point and evaluate at another: the average of an optimizer's steps, and copies of weights."""
