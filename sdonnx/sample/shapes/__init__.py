"""Sample pipelines that are trained on drawings of shapes: captions, drawings, judge and training."""
