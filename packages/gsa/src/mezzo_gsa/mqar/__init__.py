"""Multi-query associative recall: GSA beside other mixers (section 4.1.2, figure 3a)."""
